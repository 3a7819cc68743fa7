"""The three processes without their sockets: coordinator, edge, aggregator.

The services and the simulation both run these, so a round is the same in either.
"""
