"""Shell text as words: what bash makes of it, by hand and by bash itself."""

import random
import re
import subprocess

import pytest

from megatron_wlb.cli.shell import read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1; B=$A\nx $B ${A} ${C:-3} ${C-4} ${D}", "A=1 ; B=1 ; x 1 1 3 4 ${D}"),
        ("export A=1 B=2\n--x=$A$B", "export A=1 B=2 ; --x=12"),
        ("A=2\n$((A * 3)) $(( $A*12/8 )) $((A+1)) $((2*(A+3)-1)) $((7%A))", "A=2 ; 6 3 3 9 1"),
        ("$((1/0)) $((1-2)) $((B)) $((1 2)) $((1+)) $(((1)", "$((1/0)) $((1-2)) $((B)) $((1 2)) $((1+)) $ ((( 1 )"),
        ("A=3\nA=4 # A=5 is a comment, isn't it\n$A", "A=3 ; A=4 ; 4"),
        ("A=$(date)\n$A", "A=$ ( date ) ; $A"),
        ('A=1\nA=`date +%s` B="$(date)" C=$((D))\n$A $B $C', "A=1 ; A=`date +%s` B=$(date) C=$((D)) ; $A $B $C"),
        ('"--split \'9,1\'" "a b" "--x"', "--split 9,1 a b --x"),
        ("C='a b; c' # \nsrun /bin/bash -x -lc \"${C}\"", "C=a b; c ; srun /bin/bash -x -lc a b ; c"),
        ("sh -c \"zsh -c 'a b; c'\"; python -c 'a b; c'", "sh -c zsh -c a b ; c ; python -c a b; c"),
        ("A='a; b'; eval \"$A\"", "A=a; b ; eval a ; b"),
        ("x --data a\necho b \\\n c", "x --data a ; echo b c"),
    ],
)
def test_words_of_a_shell(text, words):
    assert " ".join(read(text, {})) == words


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("A='--x 8'\nA+=' --y 2'\nA+=\" --z $B\"\n$A", "--x 8 --y 2 --z $B"),
        ('B=1; A="--x 8"\nif true; then\n  A="$A --y $B"\nfi\n$A', "--x 8 --y 1"),
        ('A="$A --x"\n$A', "$A --x"),  # of the environment
        ("A+=' --x'\n$A", "$A --x"),
        ("N=${N:-32}; N=${N:-8}\n$N", "32"),
        ("if true; then A=1; else A=2; fi; B=${A:-3}\n$B", "2"),
        ("N=${W:-1}; W=$((8*N))\n$N $W", "1 8"),
        ("A=2\n${A:+--x $A} ${B:+--y $B} ${A+1} ${B+1} ${C:-3}", "--x 2 1 3"),
        ('A=(--x 2)\n${A[@]+"${A[@]}"} "${A[@]}"', "--x 2 --x 2"),
        ("A=1; B=$A; A=2\n$B $A", "1 2"),
        ("A=; B=\n${A-1}${A:-2} ${B:-3}", "2 3"),
        (": ${A:=8} ${B:=$A}\n$A$B", "88"),
        ("A=8\n${A:?is not set} ${A?} ${B:?is not set}", "8 8 ${B:?is not set}"),
        ("A=${B:-${C:-'5'}}\n$A", "5"),
        ('A="${1:-"a b"}"\n"$A"', "a b"),
        ("D=2\nA=$((D*8)) B=$((128*1024))\n$A $B", "16 131072"),
        ('C="x --split \'99,1,0\'"\nbash -c "$C"', "bash -c x --split 99,1,0"),
        ("C=\"x --split '99,1,0'\"\n$C", "x --split 99,1,0"),
        ('C="x \\"a b\\" \\\\$D"\nbash -c "$C"', "bash -c x a b $D"),
        ('A="don\'t"\necho $A', "echo don't"),
        ("A='$B'; B=1\n$A", "$B"),  # as in a shell
        ('A=(1 2)\nA+=(\n  3 # 4\n  $B\n)\n"${A[@]}" ${A[*]} ${B[@]}', "1 2 3 $B 1 2 3 $B ${B[@]}"),
        ("A=(1)\nA=()\nx ${A[@]}", "x"),
        ('A=(1)\nA=("${A[@]}" 2)\nA+=(3 "${A[@]}")\nx ${A[@]}', "x 1 2 3 1 2"),
        ("A=1; A=/$(date)/x; B+=$(date)\n$A $B", "$A $B"),
        ("A=B; (( A = 3 ))\n$A", "B"),
    ],
)
def test_variables_of_a_shell(text, last):
    """As they are where they are used, in the last line, whatever the number of words that they hold."""
    words = read(text, {})
    assert " ".join(words[len(words) - words[::-1].index(";") :]) == last


VALUES_OF_A_SHELL = r"""
8 | ' --x 8' | "--y $A" | "$A --z $B" | ${A:-3} | ${B:-${C:-5}} | ${C-4} | "${E:=7}" | $((2*3)) | $((D+1)) | '' | $D
$(( (D+2)*D-7%D )) | a\ b | "a b" | '$D' | "x \"q\" \\" | 'it'"'"'s' | "${R[@]}"
"""
LINES_OF_A_SHELL = (
    *("{0}={1}", "{0}={1}", "{0}+={1}", "{0}+={1}", "R=({1} # it's\n {2})", "R+=({1})", "R=()"),
    *("if true; then {0}={1}; {0}+={2}; fi # don't", "export F={2} {0}={1}"),
)


@pytest.mark.parametrize("seed", range(50))
def test_variables_are_those_of_bash(seed):
    """But for quotes in what is split, and for blanks in an entry that is a flag."""
    chosen, values = random.Random(seed), re.split(r" \| |\n", VALUES_OF_A_SHELL.strip())
    lines = ["unset E; A=1; B=2 C=3; D=4; R=() F="]
    for _ in range(chosen.randint(1, 6)):
        line = chosen.choice(LINES_OF_A_SHELL)
        lines.append(line.format(chosen.choice("ABC"), *chosen.choices(values, k=2)))
    lines.append('print $A "$B" x${C}y "${R[@]}" ${E:-9} "$F" \\\n $C')
    text = "\n".join(lines)
    shell = ["bash", "-c", f'print() {{ printf "%s\\0" "$@"; }}\n{text}']
    printed = subprocess.run(shell, capture_output=True, check=True, text=True).stdout.split("\0")[:-1]

    def plain(words):
        return [part for word in words for part in re.sub("[\"']", "", word).split()]

    words = read(text, {})
    assert plain(words[words.index("print") + 1 :]) == plain(printed)


def test_functions_have_variables_of_later_lines():
    text = "train() {\n  x $N ${M:-1} $*\n}\nL=${K}2\nN=$L\nM=4\nK=3"
    assert read(text, {})[4:8] == ["x", "32", "4", "$*"]


@pytest.mark.parametrize("script", ["A='x\ny", 'x "$A'])
def test_an_open_quote_is_named(script):
    with pytest.raises(ValueError, match=f"no closing quotation for {re.escape(script[2:].split()[0])}; check its"):
        read(script, {})
