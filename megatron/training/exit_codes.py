"""The codes a training process leaves with; every rank of a run leaves with the same one.

0    the run is complete: all iterations done, or --exit-interval or --exit-duration-in-mins reached; state is saved
1    it failed: an exception, a loss that is not finite, data or a checkpoint that cannot be read or written; the
     checkpoints that were complete before are intact
2    the command line is wrong: the flags contradict each other, and nothing was built
75   it was asked to stop by a signal, finished its step and saved (BSD's EX_TEMPFAIL, "try again later"): start it
     again with --load to go on
"""

from __future__ import annotations

COMPLETE = 0
FAILED = 1
USAGE = 2
STOPPED_BY_SIGNAL = 75
