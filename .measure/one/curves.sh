#!/bin/bash
# in the background: curves in turn
. .measure/one/common.sh
sleep ${WAIT:-0}
for c in "$@"; do curve ${c/-/ }; done
