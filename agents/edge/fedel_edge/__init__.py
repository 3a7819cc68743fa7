"""The edge agent: takes part in runs on one device. It only opens connections, it accepts none."""
