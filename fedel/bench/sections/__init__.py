"""The sections of ``fedel bench``, one per module; each has a ``SECTION``. A new module is found by itself."""
