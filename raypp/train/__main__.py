import sys

from raypp.train.torchrun import main

sys.exit(main())
