"""FedEL from Python: ``simulate``, ``run``, ``compare`` and ``load``. The command calls the same functions.

The shape, which every module here keeps to:

* A *job* is the path of a TOML file, a table (dict) with the same keys, or a typed ``SimulationConfig`` or
  ``RunConfig``. ``jobs`` turns each of them into one table, with overrides on top.
* *Objects* (a model function, arrays, a method) get a name in that table. What lies in a module is named
  ``package.module:attribute``, as in a file; everything else ``object:NAME-HASH``, and is known to this process
  only (``objects``). So a run stores what it was made of, and refuses to go on with something else.
* The functions wait until the run is over, show each round where the caller wants it (``progress``), and return
  what lies on disk (``results``): a ``Result`` of a run of today is that of a run of last week.
"""
