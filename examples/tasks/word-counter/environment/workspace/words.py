"""Count the words of a file: python3 words.py FILE"""

import sys


def main(argv):
    with open(argv[0]) as file:
        print(len(file.read().split()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
