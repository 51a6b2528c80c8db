# SPDX-License-Identifier: Apache-2.0
"""The recorded order predicts, and a changed order is followed."""

from __future__ import annotations

import random

import pytest

from ds_fuyou.parameters.trace import AccessTrace, Ahead


def recorded(*items: int) -> AccessTrace:
    trace = AccessTrace()
    for item in items:
        trace.use(item)
    trace.end_step()
    return trace


def walked(ahead: Ahead) -> list[int]:
    """What the walk comes to, to its end."""
    items = []
    while (item := ahead.peek()) is not None:
        items.append(item)
        ahead.pop()
    return items


def upcoming(trace: AccessTrace) -> list[int]:
    return walked(Ahead(trace, lambda item, is_next_step: True))


def test_nothing_is_predicted_before_the_first_step_has_ended() -> None:
    trace = AccessTrace()
    trace.use(1)
    assert upcoming(trace) == []


def test_what_follows_in_the_last_step_comes_next() -> None:
    trace = recorded(1, 2, 3, 3, 2, 1)
    assert upcoming(trace) == [1, 2, 3, 3, 2, 1]
    trace.use(1)
    trace.use(2)
    assert upcoming(trace) == [3, 3, 2, 1, 1, 2]


def test_a_skipped_layer_moves_the_prediction_on() -> None:
    trace = recorded(1, 2, 3, 4)
    trace.use(1)
    trace.use(3)
    assert upcoming(trace)[0] == 4


def test_an_evaluation_in_between_starts_again() -> None:
    trace = recorded(1, 2, 3)
    for item in (1, 2, 3, 1):
        trace.use(item)
    assert upcoming(trace)[0] == 2


def test_an_unknown_item_leaves_the_prediction() -> None:
    trace = recorded(1, 2)
    trace.use(99)
    assert upcoming(trace) == [1, 2, 99], "and it may come again after that"


def test_a_step_without_use_keeps_the_order() -> None:
    trace = recorded(1, 2)
    trace.end_step()
    assert upcoming(trace) == [1, 2]


def test_first_uses_are_the_forward_order() -> None:
    assert recorded(5, 3, 5, 4, 3).first_uses() == [5, 3, 4]


def test_serving_without_steps_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_fuyou.parameters.trace.LONGEST_TRACE", 6)
    trace = recorded(*[9] * 10, 1, 2, 3, 3, 2, 1)
    assert len(trace._history) <= 12
    assert upcoming(trace)[-6:] == [1, 2, 3, 3, 2, 1]


def test_a_walk_comes_to_each_place_once_and_again_where_the_item_went_away() -> None:
    trace = recorded(1, 2, 3, 3, 2, 1)
    ahead = Ahead(trace, lambda item, is_next_step: not is_next_step)
    assert walked(ahead) == [1, 2, 3, 3, 2, 1]
    trace.use(1)
    assert walked(ahead) == []
    ahead.gone(1)
    trace.use(2)
    ahead.gone(2)
    assert walked(ahead) == [2, 1], "backward needs them again, in this order"
    trace.use(3)
    trace.use(3)
    ahead.gone(3)
    assert walked(ahead) == [], "3 is not needed any more"


def test_a_walk_follows_a_changed_order() -> None:
    trace = recorded(1, 2, 3, 4, 5)
    ahead = Ahead(trace, lambda item, is_next_step: not is_next_step)
    assert walked(ahead) == [1, 2, 3, 4, 5]
    trace.use(3)
    assert walked(ahead) == [4, 5]
    trace.use(1)
    assert walked(ahead) == [2, 3, 4, 5]


def test_only_what_never_changes_is_wanted_for_the_next_step() -> None:
    trace = recorded(1, 2, 3)
    ahead = Ahead(trace, lambda item, is_next_step: item == 2 or not is_next_step)
    for item in (1, 2, 3):
        trace.use(item)
    assert walked(ahead) == [2]
    trace.end_step()
    assert walked(ahead) == [1, 2, 3]


def demanded(trace: AccessTrace, items: list[int]) -> list[int]:
    """What the trace did not expect."""
    wrong = []
    for item in items:
        expected = trace.at(trace.cursor) if trace.period else None
        if expected != item:
            wrong.append(item)
        trace.use(item)
    return wrong


FORWARD, BACKWARD = [1, 2, 3, 4], [4, 3, 2, 1]


def test_the_order_of_the_model_is_expected_before_the_first_use() -> None:
    trace = AccessTrace()
    trace.expect(FORWARD)
    assert demanded(trace, FORWARD * 3) == [], "an engine that only infers is right from the first forward on"


def test_a_token_follows_the_token_before_it() -> None:
    trace = recorded(*FORWARD, *BACKWARD)
    assert demanded(trace, FORWARD * 64) == [1], "the second token, where backward was expected"
    assert demanded(trace, FORWARD * 64) == []


def test_every_step_of_a_rollout_and_of_micro_batches_is_wrong_only_where_its_kind_changes() -> None:
    trace = AccessTrace()
    trace.expect(FORWARD)
    wrong = []
    for num_tokens in (8, 8, 5, 11):
        wrong.append(len(demanded(trace, FORWARD * num_tokens + (FORWARD + BACKWARD) * 3)))
        trace.end_step()
    assert wrong[1] == 0, "the same again"
    assert max(wrong[2:]) <= 8, "another number of tokens"


def test_micro_batches_repeat_as_a_whole_with_their_step() -> None:
    trace = recorded(*(FORWARD + BACKWARD) * 4)
    for _ in range(3):
        assert demanded(trace, (FORWARD + BACKWARD) * 4) == []
        assert upcoming(trace)[:4] == FORWARD
        trace.end_step()


@pytest.mark.parametrize("num_items", [100, 300, 600])
@pytest.mark.parametrize("skipped", [0, 1])
def test_what_goes_on_where_a_step_was_to_end_is_followed(num_items: int, skipped: int) -> None:
    """One more micro-batch, as the last step of an epoch has fewer: all of it is still of this step."""
    micro_batch = [*range(num_items)]
    trace = recorded(*micro_batch)
    ahead = Ahead(trace, lambda item, is_next_step: not is_next_step)
    for item in (micro_batch + micro_batch[skipped:])[: num_items + 20]:
        trace.use(item)
        walked(ahead)
    step = trace.next_step()
    assert step is None or step >= trace.cursor
    assert ahead._place > trace.cursor + 50, "what comes next is wanted"


@pytest.mark.parametrize("num_items", [100, 300, 600])
def test_after_many_tokens_training_is_what_it_was_before_them(num_items: int) -> None:
    """However many, and always others: the last places of an item are all of tokens."""
    trace, forward = AccessTrace(), [*range(num_items)]
    trace.expect(forward)
    wrong = []
    for num_tokens in (64, 64, 50, 80, 60):
        wrong.append(len(demanded(trace, forward * num_tokens + (forward + forward[::-1]) * 3)))
        trace.end_step()
    assert max(wrong[1:]) <= 40


@pytest.mark.parametrize("seed", range(20))
def test_a_long_past_is_forgotten_at_any_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, trace = random.Random(seed), AccessTrace()
    monkeypatch.setattr("ds_fuyou.parameters.trace.LONGEST_TRACE", draw.choice([16, 64, 600]))
    items = [*range(draw.choice([3, 10, 200, 700]))]
    for _ in range(300):
        kind = draw.random()
        if kind < 0.1:
            trace.end_step()
        elif kind < 0.4:
            trace.use(draw.choice(items))
        else:
            for item in items[: draw.randint(1, len(items))]:
                trace.use(item)
        assert 0 <= trace.period <= len(trace._history)
        step = trace.next_step()
        assert step is None or (trace.cursor <= step < trace.now and trace.is_step(trace.at(step)))


def test_what_comes_where_it_is_not_expected_is_doubtful() -> None:
    """Layers of eight, of which each has one expert of many behind it: never the same."""
    dense = [[100 * layer + i for i in range(8)] for layer in range(20)]
    trace, experts = AccessTrace(), iter(range(10_000, 20_000))
    for _ in range(3):
        used = [next(experts) for _ in dense]
        for layer, expert in zip(dense, used, strict=True):
            for item in (*layer, expert):
                trace.use(item)
    turn = trace.turn
    assert set(used) < set(upcoming(trace))
    for layer in dense:
        for item in (*layer, next(experts)):
            trace.use(item)
    assert all(map(trace.is_doubtful, used[:-1])), "the next use passes the last one"
    assert not any(trace.is_doubtful(item) for layer in dense for item in layer)
    assert trace.turn == turn, "exceptions"
    # Now the same ones again and again: each is trusted when it came where it was expected.
    used = [next(experts) for _ in dense]
    for _ in range(2):
        for layer, expert in zip(dense, used, strict=True):
            for item in (*layer, expert):
                trace.use(item)
    assert not any(map(trace.is_doubtful, used))
    assert set(used[:-1]) < set(upcoming(trace))


def test_all_are_trusted_when_many_in_a_row_were_expected() -> None:
    trace = AccessTrace()
    for _ in range(2):
        for item in range(250):
            trace.use(item)
    for item in (*range(50), *range(54, 180)):
        trace.use(item)
    assert [item for item in range(250) if trace.is_doubtful(item)] == [50, 51, 52, 53]
    turn = trace.turn
    for item in range(180, 190):
        trace.use(item)
    assert trace.turn > turn, "walks that have passed them come to them again"
    assert not any(map(trace.is_doubtful, range(250)))


def test_steps_end_where_they_ended() -> None:
    trace = recorded(*FORWARD, *BACKWARD)
    trace.use(1)
    assert trace.next_step() == trace.cursor + 7
    endless = AccessTrace()
    endless.expect(FORWARD)
    assert endless.next_step() is None
