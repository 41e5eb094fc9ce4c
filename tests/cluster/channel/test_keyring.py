"""The secrets of one process."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from daskserve.cluster.channel.connect.keyring import MAX_SECRETS, ChannelSecret, Keyring


def test_a_secret_shows_in_no_repr_and_no_error() -> None:
    secret = ChannelSecret(b"the value")
    keyring = Keyring()
    keyring.add(secret)
    shown = f"{secret} {secret!r} {[secret]} {keyring!r} {keyring.marks}"
    assert "the value" not in shown
    same = pickle.loads(pickle.dumps(secret))
    assert same.mark == secret.mark
    assert ChannelSecret().mark != ChannelSecret().mark


def test_the_latest_secrets_are_kept() -> None:
    keyring = Keyring()
    secrets = [ChannelSecret() for _ in range(MAX_SECRETS + 2)]
    for each in secrets:
        keyring.add(each)
    keyring.add(ChannelSecret(secrets[-2]._value))
    kept = [secrets[-2], secrets[-1], *reversed(secrets[2:-2])]
    assert keyring.marks == [each.mark for each in kept]
    assert keyring.find(secrets[0].mark) is None


async def test_many_that_miss_a_secret_ask_once() -> None:
    asked = 0
    present = ChannelSecret()

    async def fetch() -> bytes:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return await present.reveal()

    keyring = Keyring(fetch)
    assert await asyncio.gather(*(keyring.renew([]) for _ in range(5))) == [True] * 5
    assert asked == 1
    known = keyring.marks
    assert not await keyring.renew(known)
    assert asked == 2


async def test_a_process_without_a_scheduler_has_no_secret() -> None:
    with pytest.raises(OSError, match="no scheduler"):
        await Keyring().renew([])
