"""``python -m tests.federation.old_agent``: an agent from before agents said which protocol they speak."""

from fedel.wire import protocol

if __name__ == "__main__":
    protocol.PROTOCOL = 0  # as the default of the field, which such an agent does not know

    from fedel_edge.__main__ import main

    raise SystemExit(main())
