# SPDX-License-Identifier: Apache-2.0
"""Fuzzers of what reads bytes of others: native code built with sanitizers, or the ordinary build in a quick test.

Each fuzzer is a function `case(random, deadline_s)` that tries some inputs made of `random`, checks what comes of them
and returns how many they were. A case is named by its number, and made again from it: see `fuzz.campaign`.
"""
