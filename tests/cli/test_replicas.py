"""`perdure coordinator` and `perdure replica` as two terminals run them, with a client, and a secret between them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from perdure import LLM, Client, InvalidValue, SamplingParams
from tests.cli.test_terminal import ENVIRONMENT, PATIENCE_S, PERDURE
from tests.witness import witness

SECRET = "a secret of more than sixteen characters"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `perdure` with these arguments; its stderr is read by the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PERDURE, *map(str, arguments)], env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str], words: str) -> str:
    """The first line on stderr that has these."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line.strip()
    raise AssertionError(f"{words!r} was never said; code {process.wait()}")


def ended(process: subprocess.Popen[str], by: int | None) -> int:
    """The code it ends with, by a signal or by itself."""
    if by is not None:
        os.kill(process.pid, by)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode is not None
    return process.returncode


def address_of_this_machine() -> str:
    """One that others could reach it at."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: it only asks for the way
        except OSError:
            pytest.skip("this machine has no address but its own")
        return str(probe.getsockname()[0])


def test_two_terminals_and_a_client(perdure, tiny: Path, tmp_path: Path, start: Start) -> None:
    """On an address of all the world: with the secret all works, without it or with another nothing does."""
    secret, other = tmp_path / "secret", tmp_path / "other"
    secret.write_text(SECRET)
    other.write_text(SECRET + "!")
    refused = perdure("coordinator", "tcp://0.0.0.0:*")
    assert refused.code == 2 and "tcp://0.0.0.0:*" in refused.err and "give a secret" in refused.err

    coordinator = start("coordinator", "tcp://0.0.0.0:*", "--secret-file", secret)
    port = line_of(coordinator, "coordinator at").rpartition(":")[2]
    endpoint = f"tcp://{address_of_this_machine()}:{port}"
    small = ("--model", tiny, "--num-pages", 64)
    replica = start("replica", "--join", endpoint, "--secret-file", secret, *small)
    stranger = start("replica", "--join", endpoint, "--secret-file", other, *small)

    ids, params = [1, 2, 3, 4], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with Client(endpoint, secret_file=str(secret), patience_s=PATIENCE_S) as client:
        (result,) = client.generate([ids], params)
    with LLM(str(tiny), num_pages=64) as direct:
        assert result.outputs[0].token_ids == direct.generate([ids], params)[0].outputs[0].token_ids

    server = start("serve", "--connect", endpoint, "--secret-file", secret, "--port", 0)
    body = {"prompt": ids, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    url = line_of(server, "serving").rpartition(" ")[2]
    served = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert served["choices"][0]["token_ids"] == result.outputs[0].token_ids
    assert ended(server, signal.SIGTERM) == 0, "replicas go on, and the server does not wait for them"

    with pytest.raises(InvalidValue, match=r"endpoint='tcp://.*give a secret"):
        Client(endpoint)
    began = time.monotonic()
    for place, secret_file in ((f"tcp://127.0.0.1:{port}", None), (endpoint, str(other))):
        with pytest.raises(InvalidValue, match="refuses this client: its secret is another"):
            Client(place, secret_file=secret_file, patience_s=PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2, "it waited as if nobody were there"
    assert "its secret is another" in line_of(stranger, "refuses this replica") and ended(stranger, None) == 2

    assert ended(replica, signal.SIGTERM) == 0
    assert ended(coordinator, signal.SIGTERM) == 0
    witness("cli-two-terminals", tokens=len(result.outputs[0].token_ids))


def test_a_client_with_a_secret_where_there_is_none(start: Start, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    coordinator = start("coordinator", "tcp://127.0.0.1:*")
    endpoint = line_of(coordinator, "coordinator at").rpartition(" ")[2]
    with pytest.raises(InvalidValue, match="or none if it has none"):
        Client(endpoint, secret_file=str(secret), patience_s=PATIENCE_S)
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[0-9]+", endpoint), "others can use what is said"
    assert ended(coordinator, signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replicas", 2), "give --launcher ray"),
        (("--model", "x"), "give --launcher ray"),
        (("--launcher", "slurm"), "'slurm' is not ray"),
        (("--launcher", "ray", "--replicas", 0), "--replicas: 0 is less than 1"),
        (("--launcher", "ray", "--drain", -1), "--drain: -1.0 is less than 0"),
        (("--policy", "best"), "routing_policy='best'"),
    ],
)
def test_wrong_options_of_a_coordinator(perdure, options: tuple[object, ...], words: str, tmp_path: Path) -> None:
    done = perdure("coordinator", f"ipc://{tmp_path}/c", *options)
    assert done.code == 2 and words in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replica-cpus", 2), "give --launcher ray"),
        (("--launcher", "ray", "--replica-gpus", -1), "replica_gpus=-1 is out of range"),
        (("--connect", "tcp://127.0.0.1:1", "--max-num-seqs", 3), "--connect: replicas that are there have settings"),
        (("--connect", "10.0.0.1"), "endpoint='10.0.0.1' is neither tcp://HOST:PORT"),
        (("--secret-file", "x"), "--connect names: give both"),
    ],
)
def test_wrong_options_of_a_server_over_replicas(perdure, options: tuple[object, ...], words: str) -> None:
    done = perdure("serve", "--port", 0, *options)
    assert done.code == 2 and words in done.err
