"""Read UTF-8 byte by byte: find out whether a text ends inside a character, and where in it."""

from __future__ import annotations

#: The state after whole characters.
BOUNDARY = 0
#: The state after bytes that cannot occur in UTF-8, or after a NUL.
INVALID = 255

#: For each state inside a character: the first and last byte that may follow, and the next state.
#: States 1 to 3 expect 1 to 3 more bytes. States 4 to 7 follow E0, ED, F0 and F4, after which some
#: bytes would spell something that is not a character (RFC 3629).
_NEXT = {
    1: (0x80, 0xBF, BOUNDARY),
    2: (0x80, 0xBF, 1),
    3: (0x80, 0xBF, 2),
    4: (0xA0, 0xBF, 1),
    5: (0x80, 0x9F, 1),
    6: (0x90, 0xBF, 2),
    7: (0x80, 0x8F, 2),
}
_AFTER_FIRST = {0xE0: 4, 0xED: 5, 0xF0: 6, 0xF4: 7}


def utf8_state(piece: bytes, state: int = BOUNDARY) -> int:
    """Return the state after `piece` in a text in `state`; INVALID if that is not UTF-8, or has a NUL."""
    if state == BOUNDARY and piece.isascii():
        return INVALID if b"\0" in piece else BOUNDARY
    for byte in piece:
        if state == BOUNDARY:
            state = _first(byte)
        else:
            low, high, state = _NEXT[state]
            if not low <= byte <= high:
                return INVALID
        if state == INVALID:
            break
    return state


def _first(byte: int) -> int:
    if byte < 0x80:
        return BOUNDARY if byte else INVALID
    if 0xC2 <= byte < 0xE0:
        return 1
    if 0xE0 <= byte < 0xF0:
        return _AFTER_FIRST.get(byte, 2)
    if 0xF0 <= byte <= 0xF4:
        return _AFTER_FIRST.get(byte, 3)
    return INVALID
