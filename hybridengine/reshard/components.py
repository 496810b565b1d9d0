"""Connected components."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Element = TypeVar("Element", bound=Hashable)


def components(links: Iterable[Iterable[Element]]) -> list[tuple[Element, ...]]:
    """Return the elements that links connect, directly or through others; each link names one element or more.

    Components, and the elements of each, are in the order in which the links first name them.
    """
    leader: dict[Element, Element] = {}

    def find(element: Element) -> Element:
        while leader.setdefault(element, element) != element:
            leader[element] = element = leader[leader[element]]
        return element

    for first, *others in links:
        one = find(first)
        for other in others:
            leader[find(other)] = one
    found: dict[Element, list[Element]] = {}
    for element in leader:
        found.setdefault(find(element), []).append(element)
    return [tuple(component) for component in found.values()]
