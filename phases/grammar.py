"""A seeded synthetic language whose next token often depends on tokens far back.

A document opens with the current name of each of four roles and then goes on in sentences:

    N0 N1 N2 N3 . T R ( word word [ R N ] word ) R N . T R ( ...

- the topic T decides in which order the words follow each other;
- the closing bracket matches the opening one, also around a quote in the sentence;
- behind that the sentence's role R comes again, and with it the name that follows this role's last
  one, which may lie many sentences back; a quote says the last name of another role as it is;
- a word is two or three letters. Two words share their first letter and two others their last, so
  one letter does not tell the word.

What comes next has mostly one of three continuations, with probabilities 0.7, 0.2 and 0.1: a draft
tree has something to branch on. Always taking the first one does not lead into a short loop, as
the names count on in each role.
"""

from __future__ import annotations

import random

__all__ = ["BEGIN", "END", "MASK", "VOCABULARY", "Grammar"]

BEGIN, END, MASK, _STOP = range(4)
"""No document has END or MASK in it: the latter is what a drafter's block is filled with."""

_TOPICS, _ROLES, _NAMES, _BRACKETS, _WORDS = 8, 4, 8, 4, 16
_SHARED = _WORDS // 2
_TOPIC = 4
_ROLE = _TOPIC + _TOPICS
_NAME = _ROLE + _ROLES
_OPEN = _NAME + _ROLES * _NAMES
_CLOSE = _OPEN + _BRACKETS
_FIRST = _CLOSE + _BRACKETS
_SECOND = _FIRST + _SHARED
_LAST = _SECOND + _WORDS
VOCABULARY = 96
"""Tokens that there are; the last few are never used."""

_WEIGHTS = (0.7, 0.2, 0.1)
_QUOTE = 0.8


class Grammar:
    """The language of one seed: which topic, role, bracket and word like to follow which."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)

        def cycle(size: int) -> list[int]:
            """The successor of each of `size` things, in one cycle through all of them."""
            order = list(range(size))
            draw.shuffle(order)
            after = [0] * size
            for place, one in enumerate(order):
                after[one] = order[(place + 1) % size]
            return after

        self._next_word = [cycle(_WORDS) for _ in range(_TOPICS)]
        self._next_topic = [cycle(_TOPICS) for _ in range(_WORDS)]
        self._next_role = [cycle(_ROLES) for _ in range(_TOPICS)]
        self._bracket = [cycle(_BRACKETS) for _ in range(_TOPICS)]
        self._start = [[draw.randrange(_WORDS) for _ in range(_ROLES)] for _ in range(_TOPICS)]

    def document(self, draw: random.Random, length: int) -> list[int]:
        """The first `length` tokens of a document; `draw` makes every choice in it."""
        names = [draw.randrange(_NAMES) for _ in range(_ROLES)]
        tokens = [BEGIN, *(self._name(role, names[role]) for role in range(_ROLES)), _STOP]
        topic, role = draw.randrange(_TOPICS), draw.randrange(_ROLES)
        while len(tokens) < length:
            bracket = self._pick(draw, self._bracket[topic], role)
            tokens += [_TOPIC + topic, _ROLE + role, _OPEN + bracket]
            word = self._pick(draw, self._next_word[topic], self._start[topic][role])
            while True:
                tokens += self._spell(word)
                if word % 4 == 2 and draw.random() < _QUOTE:
                    other, around = (role + 1) % _ROLES, (bracket + 1) % _BRACKETS
                    quoted = [_ROLE + other, self._name(other, names[other])]
                    tokens += [_OPEN + around, *quoted, _CLOSE + around]
                if word % 4 == 0:
                    break
                word = self._pick(draw, self._next_word[topic], word)
            names[role] = (names[role] + 1) % _NAMES
            tokens += [_CLOSE + bracket, _ROLE + role, self._name(role, names[role]), _STOP]
            topic, before = self._pick(draw, self._next_topic[word], topic), topic
            role = self._pick(draw, self._next_role[before], role)
        return tokens[:length]

    @staticmethod
    def _pick(draw: random.Random, after: list[int], one: int) -> int:
        """One to three steps along the cycle `after`, mostly one."""
        (steps,) = draw.choices((1, 2, 3), _WEIGHTS)
        for _ in range(steps):
            one = after[one]
        return one

    @staticmethod
    def _name(role: int, name: int) -> int:
        return _NAME + role * _NAMES + name

    @staticmethod
    def _spell(word: int) -> list[int]:
        letters = [_FIRST + word // 2, _SECOND + word, _LAST + (word + 1) // 2 % _SHARED]
        return letters if word % 2 else letters[:2]
