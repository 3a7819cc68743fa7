"""``fedel bench``: what FedEL costs on this machine, beside other systems and beside what the machine can do.

Each module of ``sections`` measures one thing (``section.py`` has their interface), ``runner.py`` writes every
figure down as soon as it is there, ``page.py`` makes a page with tables and pictures of them.
"""
