# SPDX-License-Identifier: Apache-2.0
"""Turns a stock vLLM wheel, the modules in `vllm/` and the patches in `patches/`
into the vLLM of this project.

Read in this order: `release` (what it is built for), `patch` (one patch), `compose`
(stock + modules + patches), `stock` (where the stock wheel comes from), `wheel`,
`tree` and `refresh` (development), `export` and `verify`.
"""
