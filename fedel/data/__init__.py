"""Reads data sets in their official formats, downloads and checks them, and splits them among clients."""

from fedel.data.dataset import Dataset, Split
from fedel.data.load import load_data
from fedel.data.own import from_arrays, from_torch
from fedel.data.partition import Partition, PartitionConfig

__all__ = ["Dataset", "Partition", "PartitionConfig", "Split", "from_arrays", "from_torch", "load_data"]
