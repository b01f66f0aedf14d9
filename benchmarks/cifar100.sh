#!/bin/sh
# A VGG-16 with batch norm on CIFAR-100, as in Table 2 of the paper on Gadam: SGD with the linear
# schedule (74.15 % there), GadamX averaged from epoch 161 on (76.85 %); then, at the end of each,
# the spectra of Hessian and GGN in both modes of batch norm, and the landscape.
#
#   benchmarks/cifar100.sh FOLDER_OF_DATA_SETS OUT sgd|gadamx [SEED]
#
# Seed 0 goes to OUT/sgd or OUT/gadamx; a run of another seed, to OUT/sgd-1 say, is trained only.
# The decay of GadamX is not printed there; 2.5e-3 times its rate is what the decay of SGD, 5e-4,
# comes to with its rate and momentum. MODEL, DATA, EPOCHS, START, SAMPLES and PRECISION make a
# rehearsal of it.
set -eu
data=$1 name=$3 seed=${4:-0}
out=$2/$name
[ "$seed" = 0 ] || out=$out-$seed
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
    --precision "${PRECISION:-bfloat16}" --seed "$seed" --out "$out" $how
[ "$seed" = 0 ] || exit 0
at="--samples $samples --batch-size 500 --precision tf32 --save-interval 600 --out $out $average"
$ritz spectrum "$out" --matrix both --batch-norm both --steps 100 $at
$ritz landscape "$out" --batch-norm eval --steps 30 --points 21 $at
