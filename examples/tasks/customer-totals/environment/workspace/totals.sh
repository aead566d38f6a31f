#!/bin/sh
# customers.tsv (id, name) and orders.tsv (customer, amount) -> totals.tsv (name, total)
join customers.tsv orders.tsv | awk '{s[$2]+=$3} END {for (n in s) print n, s[n]}' > totals.tsv
