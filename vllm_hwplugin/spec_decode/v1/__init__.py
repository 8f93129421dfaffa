# SPDX-License-Identifier: Apache-2.0
"""Functions that the hunks in patches/v1-* and patches/draft-* call, for Model Runner V1: fixes only.

vLLM calls V1 deprecated. It still runs: every engine up to 0.23 and those that vLLM leaves there later, which are MoE
and hybrid targets up to 0.28; n-gram, suffix and custom proposers, P-EAGLE and drafters with another vocabulary up to
0.33; every CPU engine. This package stays as long as the plugin supports such an engine. No module that V2 shares
changes for V1.
"""
