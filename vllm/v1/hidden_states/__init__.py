# SPDX-License-Identifier: Apache-2.0
"""Capture of hidden states, in the step that computes them.

``plan`` says which rows of a step belong to which request, ``ring`` owns the
memory, ``pack`` gathers the rows, ``capture`` ties the three together for a model
runner. Needs torch alone: nothing here imports a runner.
"""
