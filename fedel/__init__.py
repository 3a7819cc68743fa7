"""FedEL: federated learning for fleets of unequal devices, with one time budget for all."""

__version__ = "0.1.0"
