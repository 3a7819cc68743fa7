"""The engine's rules of secure aggregation: when a step is over, who is lost in it, when to start again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedel.core.secure_server import opened
from fedel.core.secure_sum import attempt_name
from fedel.errors import UpdateRefused
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.repeating import RepeatingTurn
from fedel.roles.run_state import OPEN, SEALED, STOPPING, OpenRound
from fedel.roles.secure_round import KEYS, REVEAL, SHARES, UPLOAD, SecureRound
from fedel.types import Report

NO_SHARES = "it did not send its shares of secure aggregation"
NEW_KEYS = "it was restarted and has lost its keys of secure aggregation"


class SecureTurn(RepeatingTurn):
    # Facts

    def keyed(self, event: ev.Keyed) -> None:
        open_round, secure = self._attempt(event.round_num, event.attempt)
        client = event.client
        if open_round is None or secure is None or client not in open_round.tasks:
            return
        if secure.step != KEYS:
            if secure.keys.get(client, event.keys) != event.keys and client not in open_round.done:
                self.set_open(replace(open_round, lost={**open_round.lost, client: NEW_KEYS}))
            return
        others = {key for name, keys in secure.keys.items() if name != client for key in keys}
        if others & set(event.keys):
            self.do(ef.Ignore(client, "keys of another client", "secure"))
            return
        self._set(
            replace(
                secure,
                keys={**secure.keys, client: event.keys},
                named={**secure.named, client: event.tensors},
                proofs={**secure.proofs, client: event.proof},
            )
        )

    def shared(self, event: ev.Shared) -> None:
        open_round, secure = self._attempt(event.round_num, event.attempt)
        client = event.client
        if open_round is None or secure is None or secure.step != SHARES or client not in secure.keys:
            return
        if event.shares.keys() != secure.keys.keys() - {client}:
            self.do(ef.Ignore(client, "shares for other clients than the roster has", "secure"))
            return
        self._set(replace(secure, shares={**secure.shares, client: event.shares}))

    def revealed(self, event: ev.Revealed) -> None:
        open_round, secure = self._attempt(event.round_num, event.attempt)
        if open_round is None or secure is None or secure.step != REVEAL:
            return
        if event.client in secure.came:
            self._set(replace(secure, reveals={**secure.reveals, event.client: event.reveal}))

    def _attempt(self, round_num: int, attempt: int) -> tuple[OpenRound | None, SecureRound | None]:
        """The open round, if this is what it is at; messages of an earlier attempt count no more."""
        open_round = self.state.open
        if open_round is None or open_round.round_num != round_num or open_round.status not in (OPEN, SEALED):
            return None, None
        secure = open_round.secure
        return (open_round, secure) if secure is not None and secure.attempt == attempt else (None, None)

    def _set(self, secure: SecureRound) -> None:
        assert self.state.open is not None
        self.set_open(replace(self.state.open, secure=secure))

    # Conclusions

    def settle_secure(self, open_round: OpenRound, due: bool) -> bool:
        """End a step if everyone is there, or if it is ``due`` and enough are; whether it did."""
        secure, lost = open_round.secure, open_round.lost
        if secure is None:
            return False
        if secure.step == KEYS:
            ready = secure.keys.keys() - lost.keys()
            num_expected = len(open_round.tasks) - len(lost)
            if len(ready) < self.min_reports or not (due or self.planner.enough(len(ready), num_expected)):
                return False
            self._begin(secure.with_roster(ready))
        elif secure.step == SHARES:
            missing = secure.keys.keys() - secure.shares.keys()
            if missing - lost.keys() and not due:
                return False
            if len(secure.shares) < self._needed(secure):
                self.again(f"{len(missing)} of {len(secure.keys)} clients sent no shares")
                return True
            self.set_open(replace(open_round, lost={**dict.fromkeys(sorted(missing), NO_SHARES), **lost}))
            self._begin(replace(secure, step=UPLOAD))
            self.open_shards()
        elif secure.step == UPLOAD and self._waits(open_round, secure) == set():
            if len(open_round.done) >= self._needed(secure):
                return False
            self.again(f"{len(open_round.done)} of {len(secure.keys)} clients sent their update")
        elif secure.step == REVEAL and secure.opened is None:
            if len(secure.reveals) < secure.threshold:
                return False
            self._unmask(open_round, secure)
        else:
            return False
        self.resend()
        return True

    def _needed(self, secure: SecureRound) -> int:
        return max(secure.threshold, self.min_reports)

    def _begin(self, secure: SecureRound) -> None:
        """Each step may take as long as the round."""
        open_round = self.state.open
        assert open_round is not None
        deadline = self.now + open_round.plan.deadline_seconds
        self.set_open(replace(open_round, secure=secure, deadline=deadline))

    def has_all_updates(self, open_round: OpenRound, secure: SecureRound) -> bool:
        is_over = secure.step == UPLOAD and not self._waits(open_round, secure)
        return is_over and len(open_round.done) >= self._needed(secure)

    def _waits(self, open_round: OpenRound, secure: SecureRound) -> set[str]:
        """Whose update may still come."""
        return secure.shares.keys() - open_round.lost.keys() - open_round.done

    def pass_step(self, open_round: OpenRound, secure: SecureRound) -> bool:
        """A deadline has passed; whether that is dealt with."""
        if secure.step == UPLOAD and len(open_round.done) < self._needed(secure):
            why = f"{len(open_round.done)} of {len(secure.keys)} clients sent their update"
            self.again(f"{why}, {self._needed(secure)} are needed")
            return True
        if secure.step == REVEAL and secure.opened is None:
            self.again(f"{len(secure.reveals)} clients stayed to the end, {secure.threshold} are needed")
            return True
        return self.settle_secure(open_round, due=True)

    def ask_to_reveal(self, held: Sequence[Report], lost: dict[str, str]) -> None:
        """The round is sealed with these updates."""
        open_round = self.state.open
        assert open_round is not None
        secure = open_round.secure
        if secure is None:
            return self.new_attempt()
        came = tuple(report.client for report in held)
        if secure.opened is not None:  # a restart in the middle of the commit
            self.set_open(replace(open_round, reports=tuple(r for r in held if r.client in secure.came)))
            return self._commit()
        if len(came) < self._needed(secure):
            return self.again(f"{len(came)} updates came, {self._needed(secure)} are needed")
        if alone := secure.alone(came):
            return self.again(f"of {', '.join(alone[:3])} the update of a single client came")
        self.set_open(replace(open_round, reports=tuple(held), lost=lost))
        self._begin(replace(secure, step=REVEAL, came=came))
        return self.resend()

    def _unmask(self, open_round: OpenRound, secure: SecureRound) -> None:
        try:
            secrets = opened(
                attempt_name(open_round.round_num, secure.attempt),
                secure.keys,
                secure.masking,
                secure.came,
                secure.reveals,
            )
        except UpdateRefused as error:
            return self.again(str(error))
        self._set(replace(secure, opened=secrets))
        self.do(ef.Persist("opened"))
        return self._commit()

    def _commit(self) -> None:
        open_round = self.state.open
        secure = open_round.secure if open_round else None
        assert open_round is not None
        assert secure is not None
        self.do(ef.Commit(open_round.round_num, secure.came, secure.opened, secure.attempt))

    def resend(self, only: str = "") -> None:
        """Ask those who have not answered what the present step asks; ``only`` one of them."""
        open_round = self.state.open
        secure = open_round.secure if open_round else None
        if open_round is None or secure is None:
            return
        about = open_round.round_num, secure.attempt
        if secure.step == SHARES:
            asked = [client for client in secure.keys if client not in secure.shares]
        elif secure.step == UPLOAD:
            asked = [client for client in secure.shares if client not in open_round.done]
        else:
            asked = [client for client in secure.came if client not in secure.reveals]
        for client in asked:
            if only and client != only:
                continue
            if secure.step == SHARES:
                self.do(ef.SendRoster(client, *about, secure.keys, secure.named, secure.proofs))
            elif secure.step == UPLOAD:
                self.do(ef.SendGroup(client, *about, secure.shares_for(client)))
            elif secure.opened is None:
                self.do(ef.SendUnmask(client, *about, secure.summed))

    # Attempts

    def first_attempt(self) -> SecureRound | None:
        return SecureRound(int(self.now * 1000)) if self.relays else None

    def again(self, why: str) -> None:
        """Too many were lost: what clients trained is masked again, with new keys."""
        open_round = self.state.open
        assert open_round is not None
        if self.state.phase == STOPPING:
            return self.interrupt()
        told = f"round {open_round.round_num + 1}: secure aggregation did not get to its end: {why}"
        if open_round.repeats >= self.rounds.max_repeats:
            return self.hold(f"{told}, {open_round.repeats + 1} times (rounds.max_repeats)")
        self.set_open(replace(open_round, repeats=open_round.repeats + 1))
        return self.new_attempt()

    def new_attempt(self) -> None:
        open_round = self.state.open
        assert open_round is not None
        before = open_round.secure.attempt if open_round.secure else 0
        secure = SecureRound(max(int(self.now * 1000), before + 1))
        self.set_open(
            replace(
                open_round,
                status=OPEN,
                secure=secure,
                sealed_at=0.0,
                seals=open_round.seals + 1,
                done=frozenset(),
                lost={},
                reports=(),
                deadline=self.now + open_round.plan.deadline_seconds,
            )
        )
        self.do(ef.Persist("plan"))
        self.send_tasks(open_round.tasks)
