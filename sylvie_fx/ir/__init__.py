"""The hall that the compiler and the machine share: errors, options, placements, rules, ops, programs."""
