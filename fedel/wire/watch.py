"""Following a run: a status comes in as many messages as it needs, and is put together here."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence

from fedel.v1 import coordinator_pb2 as pb

MAX_CLIENTS = 1000
"""Clients in one message; each takes some hundred bytes."""
MAX_LETTERS = 512 * 1024
"""Letters of a round in one message; each takes at most four bytes, and a message at most 4 MiB."""


def in_parts(
    status: pb.RunStatus, clients: Sequence[pb.ClientStatus], rounds: Sequence[str]
) -> Iterator[pb.WatchRunResponse]:
    """The messages of one status. ``rounds`` have at most ``MAX_LETTERS`` together, or there is only one."""
    parts = [pb.WatchRunResponse(status=status)]
    parts[0].status.clients.extend(clients[:MAX_CLIENTS])
    for start in range(MAX_CLIENTS, len(clients), MAX_CLIENTS):
        some = pb.RunStatus(clients=clients[start : start + MAX_CLIENTS])
        parts.append(pb.WatchRunResponse(status=some))
    if len(rounds) == 1 and len(rounds[0]) > MAX_LETTERS:
        (text,) = rounds
        for start in range(0, len(text), MAX_LETTERS):
            parts.append(pb.WatchRunResponse(round_piece=text[start : start + MAX_LETTERS]))
    else:
        parts[-1].status.rounds_json.extend(rounds)
    for part in parts[:-1]:
        part.more = True
    yield from parts


async def whole(answers: AsyncIterable[pb.WatchRunResponse]) -> AsyncIterator[pb.RunStatus]:
    """Each status of a run, with all its clients and the rounds that are new in it."""
    status, pieces = pb.RunStatus(), list[str]()
    async for answer in answers:
        status.MergeFrom(answer.status)
        pieces.append(answer.round_piece)
        if not answer.more:
            if any(pieces):
                status.rounds_json.append("".join(pieces))
            yield status
            status, pieces = pb.RunStatus(), []
