"""scipy's optimiser, with its linear algebra on one thread.

L-BFGS-B on seven numbers calls LAPACK many thousand times. OpenBLAS hands even
such calls to its threads, which then wait for each other: on a busy machine a fit
took twenty times the CPU. scipy brings an OpenBLAS of its own, which reads its
number of threads when it is loaded: so it is set while scipy is imported here, and
nowhere else. A site's own OPENBLAS_NUM_THREADS or OMP_NUM_THREADS counts.
"""

import os

_NAME = "OPENBLAS_NUM_THREADS"
_OURS = not {_NAME, "OMP_NUM_THREADS"} & os.environ.keys()
if _OURS:
    os.environ[_NAME] = "1"
try:
    from scipy.optimize import Bounds, minimize
finally:
    if _OURS:
        del os.environ[_NAME]

__all__ = ["Bounds", "minimize"]
