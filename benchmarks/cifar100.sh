#!/bin/sh
# Train a VGG-16 with batch norm on CIFAR-100, as in Table 2 of the Gadam paper: SGD with the linear
# schedule (74.15 % in the paper), or GadamX averaged from epoch 161 on (76.85 %). Then compute the
# spectra of Hessian and Gauss-Newton matrix in both batch-norm modes, and the landscape.
#
#   benchmarks/cifar100.sh FOLDER_OF_DATA_SETS OUT sgd|gadamx [SEED]
#
# Seed 0 is written to OUT/sgd or OUT/gadamx. Other seeds are written to OUT/sgd-1 and so on, and are
# only trained. The pictures in docs/images were made with --lr 0.05 for SGD. The paper does not state
# the weight decay of GadamX: 2.5e-3 times its learning rate equals the decay 5e-4 of SGD with its
# learning rate and momentum. For a short test, set the variables MODEL, DATA, EPOCHS, START, SAMPLES
# and PRECISION. The study vgg16 has the other optimisers of the table.
set -eu
data=$1 name=$3 seed=${4:-0}
out=$2/$name
[ "$seed" = 0 ] || out=$out-$seed
ritz=${RITZ:-ritz}
samples=${SAMPLES:-5000}
start=${START:-161}
case $name in
    sgd) how="--optimizer sgd --lr 0.1 --weight-decay 5e-4" average="" ;;
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
