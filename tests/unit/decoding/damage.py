"""Messages that are damaged at random."""

from __future__ import annotations

import random


def damaged_message(payload: bytes, choice: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(choice.randint(1, 3)):
        at = choice.randrange(len(data)) if data else 0
        action = choice.randrange(4)
        if action == 0 and data:
            data[at] = choice.choice((0, 1, 0x22, 0x5C, 0x7F, 0x80, 0xFF, choice.randrange(256)))
        elif action == 1:
            del data[at:]
        elif action == 2:
            del data[at : at + choice.randint(1, 4)]
        else:
            data[at:at] = choice.randbytes(choice.randint(1, 4))
    return bytes(data)


MARKS = b'"\\{}()[],;:=>+-.eN0193 \n\t/\xff\xc3Tx'


def damaged(text: bytes, choice: random.Random) -> bytes:
    """The same with a byte or two changed, missing, or one too many."""
    data = bytearray(text)
    for _ in range(choice.randint(1, 2)):
        at = choice.randint(0, len(data))
        action = choice.randrange(4)
        if action == 0:
            data[at:at] = bytes([choice.choice(MARKS)])
        elif action == 1:
            del data[at : at + choice.randint(1, 3)]
        elif action == 2:
            data[at : at + 1] = bytes([choice.choice(MARKS)])
        else:
            del data[at:]
    return bytes(data)
