"""StateMachine: what a table answers, and which tables it refuses to be."""

from __future__ import annotations

from enum import StrEnum

import pytest

from penstock.core.errors import IllegalMove
from penstock.core.machine import StateMachine, Step


class Door(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    BRICKED_UP = "bricked up"
    TURNED_AWAY = "turned away"
    NO_SUCH_DOOR = "no such door"


class Deed(StrEnum):
    BUILD = "build"
    REFUSE = "refuse"
    CLOSE = "close"
    OPEN = "open"
    KNOCK = "knock"
    BRICK_UP = "brick up"


MOVES = {
    (Door.OPEN, Deed.CLOSE): Door.CLOSED,
    (Door.CLOSED, Deed.OPEN): Door.OPEN,
    (Door.CLOSED, Deed.KNOCK): Door.CLOSED,
    (Door.CLOSED, Deed.BRICK_UP): Door.BRICKED_UP,
    (Door.BRICKED_UP, Deed.KNOCK): Door.BRICKED_UP,
}


@pytest.fixture
def door() -> StateMachine[Door, Deed]:
    return StateMachine(
        "door",
        states=Door,
        initial=(Deed.BUILD, Door.OPEN),
        refused=(Deed.REFUSE, Door.TURNED_AWAY),
        absent=Door.NO_SUCH_DOOR,
        moves=MOVES,
    )


def test_a_move_in_the_table_leads_where_the_table_says(door):
    assert door.judge(Door.OPEN, Deed.CLOSE) is Step.MOVE
    assert door.after(Door.OPEN, Deed.CLOSE) is Door.CLOSED


def test_an_event_that_leads_to_the_present_state_is_a_repeat_and_changes_nothing(door):
    assert door.judge(Door.CLOSED, Deed.CLOSE) is Step.REPEAT
    assert door.after(Door.CLOSED, Deed.CLOSE) is Door.CLOSED


def test_a_move_within_a_state_is_a_move_that_keeps_the_state(door):
    assert door.judge(Door.CLOSED, Deed.KNOCK) is Step.MOVE
    assert door.after(Door.CLOSED, Deed.KNOCK) is Door.CLOSED


def test_a_move_not_in_the_table_is_refused_with_its_facts(door):
    assert door.judge(Door.OPEN, Deed.BRICK_UP) is Step.ILLEGAL
    with pytest.raises(IllegalMove) as refusal:
        door.after(Door.OPEN, Deed.BRICK_UP)
    assert refusal.value.facts == {"machine": "door", "state": "open", "event": "brick up"}


def test_a_state_that_only_keeps_itself_is_final(door):
    assert door.final == {Door.BRICKED_UP, Door.TURNED_AWAY}
    assert door.is_final(Door.BRICKED_UP)
    assert not door.is_final(Door.CLOSED)


def test_moves_are_listed_in_the_order_of_the_table(door):
    assert list(door) == [(before, event, after) for (before, event), after in MOVES.items()]


def test_the_table_does_not_change_with_the_mapping_it_was_made_from():
    moves = dict(MOVES)
    machine = StateMachine(
        "door",
        states=Door,
        initial=(Deed.BUILD, Door.OPEN),
        refused=(Deed.REFUSE, Door.TURNED_AWAY),
        absent=Door.NO_SUCH_DOOR,
        moves=moves,
    )
    moves.clear()
    assert machine.after(Door.OPEN, Deed.CLOSE) is Door.CLOSED


def test_what_is_refused_at_the_door_is_born_final(door):
    assert door.births == {Deed.BUILD: Door.OPEN, Deed.REFUSE: Door.TURNED_AWAY}
    assert (door.birth, door.initial) == (Deed.BUILD, Door.OPEN)
    assert door.is_final(door.births[Deed.REFUSE])


def test_absent_is_no_state_that_a_job_can_be_in(door):
    assert door.absent is Door.NO_SUCH_DOOR
    assert Door.NO_SUCH_DOOR not in door.states
    assert Door.NO_SUCH_DOOR not in door.final
    assert door.judge(Door.NO_SUCH_DOOR, Deed.CLOSE) is Step.ILLEGAL


def test_a_table_with_a_state_that_no_move_leads_to_is_refused():
    with pytest.raises(ValueError, match=r"door: no move leads to .*turned away"):
        StateMachine(
            "door",
            states=Door,
            initial=(Deed.BUILD, Door.OPEN),
            absent=Door.NO_SUCH_DOOR,
            moves=MOVES,
        )


@pytest.mark.parametrize(
    "extra",
    [
        {(Door.OPEN, Deed.REFUSE): Door.NO_SUCH_DOOR},
        {(Door.NO_SUCH_DOOR, Deed.BUILD): Door.OPEN},
    ],
    ids=["to it", "from it"],
)
def test_a_table_with_a_move_to_or_from_absent_is_refused(extra):
    with pytest.raises(ValueError, match="no job can be no such door"):
        StateMachine(
            "door",
            states=Door,
            initial=(Deed.BUILD, Door.OPEN),
            refused=(Deed.REFUSE, Door.TURNED_AWAY),
            absent=Door.NO_SUCH_DOOR,
            moves=MOVES | extra,
        )


def test_it_introduces_itself(door):
    assert repr(door) == "<StateMachine door: 4 states, 5 moves>"
