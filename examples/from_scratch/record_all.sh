#!/usr/bin/env bash
# Run all stages and minidp on a slow network, then draw the pictures of the README:
#
#     bash examples/from_scratch/record_all.sh FOLDER [RATE]
#
# FOLDER gets the recordings and the pictures. RATE: see slow_network.sh; 0: as it is.
set -euo pipefail
folder=$1
rate=${2:-4gbit}
here=$(dirname "${BASH_SOURCE[0]}")
on=(bash "$here/slow_network.sh" "$rate")
if [[ $rate == 0 ]]; then
    on=()
fi
mkdir -p "$folder"
for script in "$here"/stage[1-5]_*.py "$here/minidp_itself.py"; do
    name=$(basename "$script" .py)
    if [[ $name != stage4_wrong_order ]]; then
        "${on[@]}" "${PYTHON:-python}" "$script" --save "$folder/$name.json"
    fi
done
"${PYTHON:-python}" "$here/pictures.py" "$folder"/*.json
