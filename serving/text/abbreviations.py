"""Words whose full stop does not end a sentence, lower case and without it.

Only those that can't close a sentence: `etc.` or `usw.` before a capital letter does end one, and before a
small letter no rule of ours would split anyway. Languages share one list; the words hardly collide.
"""

from __future__ import annotations

_TITLES = """
mr mrs ms mx messrs dr drs prof rev fr hon pres gov sen rep gen adm col maj capt cmdr lt sgt cpl pvt st mt ft
hr hrn fam dipl ing mag bgm präs
mme mlle mm mgr sr sra srta dña ud uds sig dott avv
"""

_CONNECTIVES = """
vs viz cf approx ca resp incl excl esp
bzw vgl sog ggf evtl zzgl inkl exkl bspw insb bes allg gem lt zw ehem geb gest urspr
env
"""

# Before a number only: "No. 5", but "No. I won't."
_BEFORE_NUMBER = """
no nos nr nrn num vol vols fig figs p pp art arts sec ch chap eq tab op bd abb abs kap s z zl st tel fol
"""

NEVER_END = frozenset((_TITLES + _CONNECTIVES).split())
BEFORE_NUMBER = frozenset(_BEFORE_NUMBER.split())

# Dotted ones are taken for abbreviations as a whole ("e.g", "z.B", "U.S"), except these before a capital.
DOTTED_THAT_END = frozenset({"a.m", "p.m"})
