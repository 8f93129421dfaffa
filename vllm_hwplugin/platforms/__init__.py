# SPDX-License-Identifier: Apache-2.0
"""Which platform class vLLM is offered, and the classes: :mod:`.cuda` for NVIDIA, :mod:`.musa` for Moore Threads.

vLLM asks for the class while it is being imported itself. So nothing is imported here, and what decides
(:mod:`._detect`, :mod:`._rivals`, :mod:`._offer`) imports neither vLLM nor torch nor the patch engine. The classes do;
vLLM imports one by name once it has chosen it.
"""
