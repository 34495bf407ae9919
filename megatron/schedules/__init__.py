"""Pipeline schedules as values: generated, checked, priced and drawn before anything runs; standard library only."""
