"""``fedel certs``: the federation's own authority, and certificates for servers, people and devices.

Servers run this too, so it prints plain text: rich is not installed there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedel.errors import ConfigError
from fedel.files import write_atomic
from fedel.security.authority import CA_DAYS, DAYS, OTHER_DAYS, Authority
from fedel.security.certificates import Facts, new_request, utc_now
from fedel.security.folder import (
    CA,
    CERT,
    KEY,
    PUBLIC,
    REQUEST,
    Credentials,
    check_valid,
    ensure_key,
    install,
    load,
)
from fedel.security.identity import AGENT, ROLES, SERVICE, Identity
from fedel.security.tls import CERTS_VARIABLE, Tls
from fedel.security.tokens import Token
from fedel.wire.channel import connect
from fedel.wire.enrol import enrol, fetch_authority, renew

EXAMPLE = """example, at the server:
  fedel certs init                                               # the authority, in ca/
  fedel certs issue coordinator --role service --host server.lan --host 127.0.0.1
  fedel certs issue ada --role operator                          # a person, for run, runs and status
  fedel certs token jetson-1                                     # prints what to run on the device
on the device:
  fedel certs enrol TOKEN --at server.lan:7072 --dir certs
"""
Parser = argparse.ArgumentParser


def add_certs(parser: Parser) -> None:
    """``--certs`` of the verbs that call a coordinator."""
    parser.add_argument(
        "--certs", default="", metavar="DIR", help=f"your certificate's folder (default: ${CERTS_VARIABLE})"
    )


DAYS_HELP = (
    f"days that it is valid (default: authority {CA_DAYS:g}, service {DAYS[SERVICE]:g}, others {OTHER_DAYS:g})"
)
OPTIONS: dict[str, dict[str, Any]] = {
    "name": {"help": "name of the client, server or person"},
    "request": {"type": Path, "metavar": "FILE", "help": f"the device's {REQUEST}"},
    "token": {"nargs": "?", "default": "", "help": "what `fedel certs token` printed"},
    "--token-file": {"type": Path, "metavar": "FILE", "help": "read the token from a file instead"},
    "--at": {"required": True, "metavar": "HOST:PORT", "help": "the coordinator's enrolment port"},
    "--coordinator": {"default": "", "metavar": "HOST:PORT", "help": "let this coordinator sign it, over mTLS"},
    "--if-due": {"action": "store_true", "help": "only if two thirds of its time are over (for a timer)"},
    "--role": {"choices": ROLES, "default": AGENT, "help": f"what it may do (default: {AGENT})"},
    "--host": {"action": "append", "default": [], "help": "a service's name or address; may be repeated"},
    "--authority": {
        "type": Path,
        "default": Path("ca"),
        "metavar": "DIR",
        "help": "folder of the authority (default: ca)",
    },
    "--dir": {"type": Path, "metavar": "DIR", "help": "folder of key and certificate (default: certs)"},
    "--days": {"type": float, "default": 0.0, "help": DAYS_HELP},
    "--from": {
        "dest": "source",
        "type": Path,
        "metavar": "DIR",
        "help": "use your own authority: a folder with tls.crt and tls.key; the key stays there",
    },
    "--hours": {"type": float, "default": 24.0, "help": "how long the token is valid (default: 24)"},
    "--json": {"action": "store_true", "help": "print JSON"},
}


def add_parser(verbs: argparse._SubParsersAction[Parser]) -> None:
    parser = verbs.add_parser(
        "certs",
        description="Make, sign, renew and revoke the certificates of a federation; see docs/security.md.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for run, what, options in ACTIONS:
        action = actions.add_parser(run.__name__.strip("_"), help=what, description=f"Certificates: {what}.")
        for option in options.split():
            action.add_argument(option, **OPTIONS[option])
        action.set_defaults(run=run)


def _init(arguments: argparse.Namespace) -> int:
    if arguments.source:
        authority = Authority.adopt(arguments.authority, arguments.source)
        print(f"The authority in {authority.folder} is yours from {arguments.source}; its key stays there.")
        return 0
    there = (arguments.authority / CA).exists()
    authority = Authority.create(arguments.authority, days=arguments.days or CA_DAYS)
    said = "exists already and is not changed" if there else "is created"
    print(f"The authority in {authority.folder} {said}. Anyone who has its ca.key can make any certificate.")
    return 0


def _issue(arguments: argparse.Namespace) -> int:
    folder = arguments.dir or Path("certs") / arguments.name
    authority = Authority(arguments.authority)
    own = authority.issue(folder, _identity(arguments), arguments.host, arguments.days)
    print(f"{folder}: {_sentence(own.facts)}. Use it with tls.dir or --certs.")
    return 0


def _request(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    path = folder / REQUEST
    write_atomic(path, new_request(ensure_key(folder)), mode=PUBLIC)
    print(f"{path} must be signed: run `fedel certs sign {REQUEST} NAME` where the authority is.")
    return 0


def _sign(arguments: argparse.Namespace) -> int:
    authority, identity, folder = Authority(arguments.authority), _identity(arguments), _folder(arguments)
    try:
        request = arguments.request.read_bytes()
    except OSError as error:
        raise ConfigError(f"{arguments.request}: {error.strerror}; name the file of the request") from None
    cert = authority.sign(request, identity, arguments.host, arguments.days, str(arguments.request))
    write_atomic(folder / CERT, cert, mode=PUBLIC)
    write_atomic(folder / CA, (authority.folder / CA).read_bytes(), mode=PUBLIC)
    print(f"Signed for {identity}: copy {CERT} and {CA} from {folder} to the device, beside its {KEY}.")
    return 0


def _token(arguments: argparse.Namespace) -> int:
    identity = _identity(arguments)
    print(Authority(arguments.authority).promise(identity, arguments.host, arguments.hours))
    note = f"The token is valid once, within {arguments.hours:g} h, for {identity}. On the device:"
    print(f"{note}\n  fedel certs enrol TOKEN --at COORDINATOR:7072", file=sys.stderr)
    return 0


def _enrol(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    if not arguments.token and arguments.token_file and not arguments.token_file.exists():
        # A pod that starts again needs no token, and the secret with its token may be deleted.
        own = _still_good(folder)
        if own is not None:
            print(f"{folder}: {_sentence(own.facts)}; no token is needed.")
            return 0
    enrol_in(folder, _token_text(arguments), arguments.at)
    return 0


def enrol_in(folder: Path, text: str, at: str) -> None:
    """Exchange the token for a certificate in ``folder``, unless that was done before."""
    token = Token.parse(text)
    own = _still_good(folder, token.name)
    if own is None:
        ca = fetch_authority(at, token.fingerprint)
        own = asyncio.run(enrol(at, token, folder, ca))
    print(f"{folder}: {_sentence(own.facts)}.")


def _token_text(arguments: argparse.Namespace) -> str:
    if arguments.token_file is None:
        return str(arguments.token)
    try:
        return str(arguments.token_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{arguments.token_file}: {error.strerror}; name the file with the token") from None


def _still_good(folder: Path, name: str = "") -> Credentials | None:
    """The certificate from an earlier start, of this name if there is one."""
    if not (folder / CERT).exists():
        return None
    own = load(folder)
    same = name in ("", own.facts.identity.name)
    return own if same and utc_now() < own.facts.not_after else None


def _renew(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    if arguments.if_due and not load(folder).facts.renewable(utc_now()):
        print(f"{folder}: {_sentence(load(folder).facts)}; more than a third of its time is left.")
        return 0
    if arguments.coordinator:
        own = asyncio.run(_renew_there(arguments.coordinator, folder))
    else:
        old, authority = load(folder), Authority(arguments.authority)
        cert = authority.renew(new_request(ensure_key(folder)), old.facts, early=True)
        own = install(folder, old.ca, cert)
    print(f"{folder}: {_sentence(own.facts)}. Running processes load it by themselves.")
    return 0


async def _renew_there(address: str, folder: Path) -> Credentials:
    check_valid(load(folder).facts, str(folder), utc_now())
    async with connect(address, Tls(dir=str(folder))) as channel:
        return await renew(channel, folder, address)


def _revoke(arguments: argparse.Namespace) -> int:
    authority, identity = Authority(arguments.authority), _identity(arguments)
    revoked = authority.revoke(identity)
    print(f"Revoked {len(revoked)} certificates of {identity}; the list is {authority.folder / 'crl.pem'}.")
    print("Servers that read this file use it at once; those with tls.crl_from fetch it by themselves.")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    authority, now = Authority(arguments.authority), utc_now()
    rows = [{**asdict(i), "status": i.status(now)} for i in authority.issued()]
    for grant, expires in authority.promises():
        identity = {"role": grant.identity.role, "name": grant.identity.name}
        rows.append({**identity, "status": "token", "not_after": expires.isoformat(), "hosts": grant.hosts})
    if arguments.json:
        print(json.dumps(rows))
        return 0
    lines = [("name", "role", "status", "until", "hosts", "serial")]
    for row in rows:
        until = str(row["not_after"])[:16].replace("T", " ")
        serial = str(row.get("serial", ""))[:12]
        lines.append((row["name"], row["role"], row["status"], until, ", ".join(row["hosts"]), serial))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _show(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    facts = load(folder).facts
    if arguments.json:
        identity = {"role": facts.identity.role, "name": facts.identity.name, "hosts": facts.hosts}
        print(json.dumps({**identity, "serial": f"{facts.serial:x}", "not_after": facts.not_after.isoformat()}))
    else:
        print(f"{folder}: {_sentence(facts)}.")
    check_valid(facts, str(folder), utc_now())
    return 0


def _sentence(facts: Facts) -> str:
    at = f" at {', '.join(facts.hosts)}" if facts.hosts else ""
    return f"the certificate of {facts.identity}{at}, until {facts.not_after:%Y-%m-%d %H:%M} UTC"


def _identity(arguments: argparse.Namespace) -> Identity:
    return Identity(arguments.role, arguments.name)


def _folder(arguments: argparse.Namespace) -> Path:
    return arguments.dir or Path("certs")


ACTIONS: tuple[tuple[Callable[[argparse.Namespace], int], str, str], ...] = (
    (_init, "make the federation's own authority", "--authority --days --from"),
    (_issue, "make a key and a certificate here, in certs/NAME", "name --role --host --days --dir --authority"),
    (_request, "make a key and a signing request, on the device", "--dir"),
    (_sign, "sign a device's request", "request name --role --host --days --dir --authority"),
    (_token, "print a one-time token for one certificate", "name --role --host --hours --authority"),
    (_enrol, "exchange a token for a certificate, on the device", "token --token-file --at --dir"),
    (_renew, "the next certificate, same key, same identity", "--dir --coordinator --authority --if-due"),
    (_revoke, "revoke all certificates of a name", "name --role --authority"),
    (_list, "certificates and tokens of the authority", "--authority --json"),
    (_show, "whose certificate a folder holds, and until when", "--dir --json"),
)
