R=$(git rev-parse --show-toplevel); SAN="-fsanitize=address -fsanitize=alignment,bounds"
gcc -std=c17 -D_GNU_SOURCE -O1 -fPIC -fsanitize=address -I$R -c $R/kernels/dynamic8.c -o o/c_dynamic8.o; gcc -fPIC -c stubs2.c -o o/cpu_stubs2.o
g++ $SAN -shared -Wl,-Bsymbolic -Wl,--no-undefined -o libemu.so o/*.cu.o o/emu.o o/c_*.o o/stubs.o -lm 2>&1 | grep -o "undefined reference.*" | sort | uniq -c | head -20
g++ $SAN -shared -Wl,-Bsymbolic -Wl,--no-undefined -o libcpu.so o/cpu_*.o o/c_*.o -lopenblas -lm -lpthread 2>&1 | grep -o "undefined reference.*" | sort | uniq -c | head -20
