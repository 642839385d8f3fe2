"""A run once more: its rollouts under other methods, and a check that it repeats.

recorded       a step read back as the batch that was learned from
methods        the recipes that are asked about, as they would run here
token_weights  advantage, weight and clip state of every token under a method
parameters     the gradients of a checkpoint's weights under each method
measures       how methods differ, and on which tokens
replay         all of this step by step, and the totals
tables         its figures as rows of tables
files          the result as tables, pictures and folders for the viewer
verify         the run repeated from its manifest, and compared
bits           two recordings of a step, compared bit by bit
"""
