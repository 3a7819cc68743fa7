"""The servers: coordinator and aggregator. No torch in here."""
