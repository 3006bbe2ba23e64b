"""What measures, orders, kinds and families of heads are called, for those who only name them. It imports nothing."""

from __future__ import annotations

MEASURES = ("zeroed", "mean", "gradient", "gates")  # of a head's importance
ORDERS = (*MEASURES, "random")  # in which heads are removed, the least important first
KINDS = "previous token,diagonal,offset,begin,duplicate,induction,rare,uniform,scattered,other".split(",")
FAMILIES = ("positional", "syntactic", "rare-word")  # of kinds; the family `other` has no metric: `other` is a kind
