"""Connected components of a graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Element = TypeVar("Element", bound=Hashable)


def components(links: Iterable[Iterable[Element]]) -> list[tuple[Element, ...]]:
    """Return groups of elements connected by links, directly or indirectly; each link names one element or more.

    The groups, and the elements of each, are in order of first appearance.
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
