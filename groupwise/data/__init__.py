"""Stage 1, prompts: tasks from files and generators, their token ids, and the order they come in.

`load` reads what the configuration names, `prompts.prepare` makes token ids once for sampler and
learner alike, `cursor.Cursor` says which prompt comes next and can be saved.
"""

from groupwise.data.sources import LoadedTasks, load

__all__ = ["LoadedTasks", "load"]
