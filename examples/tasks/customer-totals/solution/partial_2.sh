#!/bin/bash
set -e
cat > totals.sh <<'EOF'
#!/bin/sh
python3 - <<'PY'
names = dict(line.rstrip('\n').split('\t') for line in open('customers.tsv'))
totals, unknown = dict.fromkeys(names, 0) if True else {}, []
for line in open('orders.tsv'):
    customer, amount = line.split()
    if customer not in names:
        unknown.append(line)
        continue
    totals[customer] = totals.get(customer, 0) + int(amount)
with open('totals.tsv', 'w') as out:
    for customer, total in totals.items():
        out.write(f'{customer}\t{names[customer]}\t{total}\n')
PY
EOF
sh totals.sh
