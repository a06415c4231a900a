"""The prefix cache alone: which prompts are known, and to whom."""

from __future__ import annotations

from beamline.serving.engine.prefix_cache import PrefixCache

PROMPT = tuple(range(100, 140))


def test_a_tenant_finds_its_own_prompts_only() -> None:
    """How much of a prompt was known is reported: it must not tell what others have sent."""
    cache = PrefixCache(1000)
    cache.put(PROMPT, "mine", 10, "token:a")
    assert cache.find((*PROMPT, 1, 2), "token:b") is None
    assert cache.find(PROMPT) is None
    assert cache.wants(PROMPT, "token:b")
    assert not cache.wants(PROMPT, "token:a")
    known = cache.find((*PROMPT, 1, 2), "token:a")
    assert known is not None
    assert (known.memory, known.length) == ("mine", len(PROMPT))


def test_a_longer_prompt_replaces_the_tenants_own_shorter_one() -> None:
    cache = PrefixCache(1000)
    cache.put(PROMPT, "theirs", 10, "token:b")
    cache.put(PROMPT, "mine", 10, "token:a")
    cache.put((*PROMPT, 1), "longer", 11, "token:a")
    assert (len(cache), cache.size) == (2, 21)
    known = cache.find(PROMPT, "token:b")
    assert known is not None
    assert known.memory == "theirs"


def test_shared_by_choice() -> None:
    cache = PrefixCache(1000, shared=True)
    cache.put(PROMPT, "mine", 10, "token:a")
    known = cache.find(PROMPT, "token:b")
    assert known is not None
    assert known.memory == "mine"
    assert not cache.wants(PROMPT, "token:b")


def test_what_was_not_asked_for_goes_first_whoever_it_belongs_to() -> None:
    cache = PrefixCache(30)
    for number, tenant in enumerate("abc"):
        cache.put(tuple(range(number, number + 20)), tenant, 10, tenant)
    assert cache.find(tuple(range(0, 20)), "a") is not None
    cache.put(PROMPT, "d", 10, "d")
    assert cache.find(tuple(range(1, 21)), "b") is None
    assert cache.find(tuple(range(0, 20)), "a") is not None


def test_half_is_forgotten_at_a_time_the_oldest_first() -> None:
    cache = PrefixCache(1000)
    for number, size in enumerate((10, 20, 30, 40)):
        cache.put(tuple(range(number, number + 20)), number, size)
    oldest = cache.find(tuple(range(0, 20)))
    newest = cache.find(tuple(range(3, 23)))
    assert oldest is not None
    assert newest is not None
    assert cache.forget_some()
    assert (oldest.memory, newest.memory) == (0, 3)
    sizes = [cache.size]
    while cache.forget_some():
        sizes.append(cache.size)
    assert sizes == [50, 0]
    assert len(cache) == 0
    assert (oldest.memory, oldest.length, newest.length) == (None, 0, 0)
    assert cache.find(tuple(range(0, 20))) is None
