#!/bin/sh
# A VGG-16 with batch norm on CIFAR-100, as in Table 2 of the paper on Gadam: SGD with the linear
# schedule (74.15 % there), GadamX averaged from epoch 161 on (76.85 %); then, at the end of each,
# the spectra of Hessian and GGN in both modes of batch norm, and the landscape.
#
#   benchmarks/cifar100.sh FOLDER_OF_DATA_SETS OUT sgd|gadamx
#
# The decay of GadamX is not printed there; 2.5e-3 times its rate is what the decay of SGD, 5e-4,
# comes to with its rate and momentum. MODEL, DATA, EPOCHS, START, SAMPLES and PRECISION make a
# rehearsal of it.
set -eu
data=$1 out=$2 name=$3
ritz=${RITZ:-ritz}
samples=${SAMPLES:-5000}
start=${START:-161}
case $name in
    sgd) how="--optimizer sgd --lr 0.05 --weight-decay 5e-4" average="" ;;
    gadamx)
        how="--optimizer gadamx --lr 0.1 --weight-decay 2.5e-3 --set compile=True"
        how="$how --average-from $start" average="--average" ;;
    *) echo "the third argument must be sgd or gadamx, got $name" >&2; exit 2 ;;
esac
$ritz train --model "${MODEL:-vgg16_bn}" --data "${DATA:-cifar100}" --data-dir "$data" \
    --epochs "${EPOCHS:-300}" --batch-size 128 --schedule linear --evaluate-every 5 \
    --precision "${PRECISION:-bfloat16}" --out "$out/$name" $how
at="--samples $samples --batch-size 500 --precision tf32 --out $out/$name $average"
$ritz spectrum "$out/$name" --matrix both --batch-norm both --steps 100 $at
$ritz landscape "$out/$name" --batch-norm eval --steps 30 --points 21 $at
