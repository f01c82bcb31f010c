"""How the loops of trees are compiled: each of their variables has one type, which spares time when they first run."""

from __future__ import annotations

import functools

from bitplan.base.loops import jit, openmp_threads

compiled = functools.partial(jit.compiled, compiler=jit.OneTypeCompiler)
inlined = functools.partial(jit.inlined, compiler=jit.OneTypeCompiler)
called = functools.partial(jit.called, compiler=jit.OneTypeCompiler)
c_function = functools.partial(openmp_threads.c_function, compiler=jit.OneTypeCompiler)
