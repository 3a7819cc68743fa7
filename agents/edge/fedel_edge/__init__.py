"""The edge agent: takes part in runs on one device, and never listens on a port."""
