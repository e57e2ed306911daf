"""What a developer works with around training, and no run needs: the core (``mua``) imports it from its verbs alone.

::

    make and try an environment   scaffold, play, domains (a list of them), recordings (official verdicts, replayed)
    know what it is worth         demonstrate (experts as agents), canned (policies that deserve nothing)
    look at what a policy does    rollout, matrix (policies by users), compare (two evaluations)
    make data from it             collect, curate
    try and plan a recipe         shrink (at toy size), plan_tables
    know what there is            algorithms (what can be configured)
"""
