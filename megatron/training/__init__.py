"""The program: set-up, the step, the loop around it, evaluation, what it reports, and how it ends."""
