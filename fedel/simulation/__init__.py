"""A hundred unequal devices on a virtual clock: the same strategies, roles and fold as the services."""
