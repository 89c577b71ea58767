"""Privacy bugs, put into the code one at a time: each must be caught by a test of the suite.

`make mutate` runs them all. A `Mutant` names the text of the source that it changes and the tests
that catch it; the bugs are in the modules beside this one, by the room that they are put into.
"""

from tests.mutants import convex, correlation, ledgers, networks

MUTANTS = (*convex.MUTANTS, *correlation.MUTANTS, *ledgers.MUTANTS, *networks.MUTANTS)
