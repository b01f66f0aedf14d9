"""Files of data sets in the formats that they are published in."""

import math
import struct


def idx_bytes(array):
    """An array of bytes as an idx file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def python2_text(text):
    return b"U" + bytes([len(text)]) + text


def python2_list(items):
    return b"](" + b"".join(items) + b"e"


def python2_array(array):
    """An array of bytes as Python 2 with protocol 2 pickles it."""
    head = b"cnumpy.core.multiarray\n_reconstruct\nq\x00cnumpy\nndarray\nq\x01K\x00\x85U\x01b\x87R"
    shape = b"(K\x01M" + struct.pack("<HBH", array.shape[0], ord("M"), array.shape[1]) + b"\x86"
    kind = b"cnumpy\ndtype\nq\x02U\x02u1K\x00K\x01\x87Rq\x03(K\x03U\x01|NNN"
    state = b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    body = array.tobytes()
    return head + shape + kind + state + b"\x89T" + struct.pack("<I", len(body)) + body + b"tb"


def python2_pickle(entries):
    """A dictionary of values that are pickled already, as the files of CIFAR are laid out."""
    pairs = b"".join(python2_text(key.encode()) + value for key, value in entries.items())
    return b"\x80\x02}q\x10(" + pairs + b"u."


def cifar_bytes(images, **labels):
    """A file of CIFAR: images ``(n, 3, 32, 32)`` and lists of labels, as Python 2 wrote it."""
    lists = {
        key: python2_list([b"K" + bytes([value]) for value in values])
        for key, values in labels.items()
    }
    return python2_pickle(
        {**lists, "data": python2_array(images.reshape(len(images), math.prod(images.shape[1:])))}
    )
