"""Torch behind the Trainer port: training, profiling, evaluation."""
