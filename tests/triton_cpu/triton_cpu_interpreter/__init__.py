# SPDX-License-Identifier: Apache-2.0
"""A Triton backend for the CPU that compiles nothing.

vLLM's V2 model runner is written in Triton. Under ``TRITON_INTERPRET=1`` its kernels
run anywhere, but Triton wants a driver that is active; this one says that it is. For
tests alone: an engine with the V1 runner that sees it would believe it has Triton.
"""
