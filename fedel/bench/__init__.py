"""``fedel bench``: what FedEL costs on this machine, beside other systems and beside what the machine can do.

Each module of ``sections`` measures one thing (``section.py`` has their interface), ``runner.py`` writes every
figure down as soon as it is there, ``page.py`` makes a page with tables and pictures of them.
"""

import os

# Hot paths are measured as a server runs them: numpy's BLAS looks at it once, when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
