"""UTF-8, byte by byte: how much of a character a text ends with."""

from __future__ import annotations

#: After whole characters.
BOUNDARY = 0
#: After bytes that cannot stand in a UTF-8 text, or a NUL.
INVALID = 255

#: For each state within a character the bytes that may come, and the state after them. States
#: 1 to 3 await so many bytes; 4 to 7 follow E0, ED, F0 and F4, after which some of the bytes
#: would spell a character that is not one (RFC 3629).
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
    """The state after `piece` in a text that is in `state`; INVALID where that is no text."""
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
